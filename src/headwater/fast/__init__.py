"""What is written for the machine: weights in few bits used as they lie in the file, and one decoding step in C.

The readable modules are the definition. What is here gives the same answers, or steps aside.
"""
