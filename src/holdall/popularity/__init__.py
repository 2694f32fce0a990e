"""Who is looked up how often: the profile of a data set, and which rows are hot."""
