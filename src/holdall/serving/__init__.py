"""Released models: their bundles, the proof of their quality, and what reads them."""
