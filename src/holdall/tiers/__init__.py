"""Tables in several places: the hot rows near the computation, the others farther away and fetched when needed."""
