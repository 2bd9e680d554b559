"""Looking at the machine while it works: what any wing may use to measure, and none owns."""
