"""From results to what a person reads: lines, terminal, DeepSpeed's text, figures, and the payload that the page draws."""
