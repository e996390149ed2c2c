def choose_wording(instruction, probability, draw):
    return instruction
