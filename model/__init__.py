from model.import_noise import silence

silence()
