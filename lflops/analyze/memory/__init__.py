"""What is alive at the peak, and what a step would need with checkpointing or sharding."""
