"""The bytes that a rank holds at its peak."""
