"""One reader per public data set, and one for tables of your own."""
