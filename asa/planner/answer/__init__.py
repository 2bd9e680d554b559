"""What is said about a plan: prediction, certificate, confidence, alternatives, and why nothing fits."""
