"""Tables in several tiers: hot rows on the device, the others in host memory or on disk, fetched for each step."""
