"""Where the rows of every table live: what this machine can do, what a step would cost, and the plan that is best."""
