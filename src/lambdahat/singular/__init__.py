"""What singular learning theory reads off a loss: how degenerate a solution is, and what that means."""
