"""`make soak`: constant load for half an hour; does anything grow?"""
