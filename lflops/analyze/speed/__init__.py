"""How fast was it, and how fast could it be: step times, MFU, the budget of a step, roofline, and the lower bound."""
