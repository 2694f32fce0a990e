"""Figures of measured results, as SVG files."""
