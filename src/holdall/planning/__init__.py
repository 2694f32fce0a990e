"""Planner of where and how tables are stored: cost model, plan, planner, presets, simulation."""
