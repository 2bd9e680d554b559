"""What lies between components of different layouts."""
