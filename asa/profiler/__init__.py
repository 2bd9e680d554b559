"""Measures times and memory of a model's components on a device, and of messages between ranks."""
