"""Holdall trains and serves recommendation models whose embedding tables do not fit."""
