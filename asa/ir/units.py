"""Names for powers, so that no number needs a comment. Nouns hold plain seconds, bytes and FLOPs."""

KIB = 1024
MIB = 1024**2
GIB = 1024**3
