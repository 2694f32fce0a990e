"""Raw files -> data set folder -> batches."""
