import threading


def exact_match(samples):
    threading.Event().wait()
