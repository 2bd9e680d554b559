"""Figures: their data as rows, and their drawing."""
