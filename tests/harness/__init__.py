"""The harness: PostgreSQL clusters, reference recoveries and loads for the end-to-end tests.

It never talks to a server that it did not start itself, and stops each of them by its own pid.
"""
