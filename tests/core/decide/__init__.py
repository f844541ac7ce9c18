"""The decision about a waiter: which candidate, where a model goes, which leave for it."""
