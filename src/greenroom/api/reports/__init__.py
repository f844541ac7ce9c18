"""What operators and monitors read: status, memory, usage, plans, and streams of these. Changes nothing."""
