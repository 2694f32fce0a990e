"""How and where tables are stored: cost model, plan, planner, presets, simulation."""
