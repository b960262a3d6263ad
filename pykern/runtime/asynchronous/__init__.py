"""Schedules without a flush: weights change while microbatches are in flight."""
