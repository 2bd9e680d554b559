"""What a run looks like from inside: spans, timelines, memory, warm-up."""
