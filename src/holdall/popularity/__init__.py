"""Popularity of ids: the profile of a data set, hot rows, and the order of ids."""
