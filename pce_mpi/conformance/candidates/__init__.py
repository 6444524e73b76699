"""Candidates: offers, adapters, and the catalogue of cases that fit an offer."""
