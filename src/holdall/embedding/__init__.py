"""All tables of a model behind one call: packs, lookup, id checks, `compress`."""
