"""What is said of a plan: prediction, certificate, doubt, alternatives, and why nothing fits."""
