"""What a Trainer says of itself, what the monitor was asked for, and the schedule that both make."""
