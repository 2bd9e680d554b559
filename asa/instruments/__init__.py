"""Instruments that observe devices, memory and other processes during work."""
