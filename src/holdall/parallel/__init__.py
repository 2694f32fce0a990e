"""Training on several processes: strategies that spread tables and batches over them."""
