"""What tests of several folders share: stacks and parts of them as processes or in this one, and waiting for them.

Parts that one folder of tests uses lie in that folder.
"""
