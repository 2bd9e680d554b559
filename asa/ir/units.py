"""Names for powers, so that no number needs a comment. Nouns hold plain seconds, bytes and FLOPs."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3

MOST_SECONDS = 1e9
"""Of one time in a file, 30 years: sums and products of times then stay far from infinity."""

MOST_SAMPLES = 2**24
"""Of a global batch: more than any training has used by far."""

MOST_AMOUNT = 1e30
"""Of one number of bytes, FLOPs or per second in a file, for the same reason."""

LEAST_RATE = 1e6
"""Of a device's FLOPs or bytes per second: less is a number in another unit (900 GB/s, 35 TFLOPS)."""
