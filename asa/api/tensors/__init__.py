"""Tensors that ranks hold in parts, used as whole ones: numbers, names, clipping, tools of torch, files."""
