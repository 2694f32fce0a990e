"""Several processes: rendezvous, collectives, sharded tables."""
