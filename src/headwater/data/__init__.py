"""Datasets: from the user's files to batches of token ids, and from model outputs to metrics. numpy only, no torch.

readers/     files -> lines -> rows -> examples; every bad row is counted and located
examples     example types, one per task, how tables hold them, and the train/validation split
summary      dataset summary, shown before training
ragged       token ids as ragged arrays; packing of documents into rows
dataset      examples as rows of token ids; batch sampler: batches of similar length, limited by tokens
collate      collate functions: token ids -> TrainBatch
corruption   self-supervised objectives: MLM, next-sentence prediction, span corruption, denoising
augment      text augmentation
dates        the built-in dataset
metrics      evaluation metrics
"""
