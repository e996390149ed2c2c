class RefusedInstructionError(ValueError):
    pass


class WordFilter:
    num_refused = 0

    def __init__(self, words):
        pass

    def check(self, text):
        pass
