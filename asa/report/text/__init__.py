"""Results as text: screens of 80 columns, and tables."""
