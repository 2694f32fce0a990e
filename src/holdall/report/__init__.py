"""Figures and pages made from what was measured."""
