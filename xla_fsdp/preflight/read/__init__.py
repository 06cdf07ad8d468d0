"""What a compiled program says: traffic, memory, findings, reports."""
