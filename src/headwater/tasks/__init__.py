"""Tasks: what a model can be trained for, one file each. A new task is one more file.

base                    Task, its data and metadata, and the registry TASKS
batch, losses           batches as tensors; cross-entropy, chunked over the vocabulary, and the loss of answer spans
seq2seq                 text to text: translation, summarization
language_model          causal language modelling, on one stream or on packed documents
masked_lm, denoising    the objectives that pretrain an encoder (BERT) or an encoder-decoder (T5, BART)
chat                    instruction tuning: conversations, with the loss on the answers
preference              DPO and its variants, on pairs of a better and a worse answer
reward_model            a reward from such pairs (Bradley-Terry)
pairs, preference_losses, logprobs   what these two share: datasets, formulas, log-probabilities of answers
ppo, grpo               learning from the rewards of sampled answers
policy, rollouts, rewards, policy_losses   what these two share: the task, sampling, reward functions, formulas
best_of_n               the best of several answers, without training
classification          a label for a text, or for a pair of texts
token_classification    named entities: a tag for every word
image_classification    a label for an image
image_text              images and their captions, matched by two towers
question_answering      the span of a text that answers a question
picture_codec           pictures to token ids and back
speech_recognition      a text for a recording
audio_classification    a label for a recording
sounds                  what these two share: windows, spectrograms, states of a frozen encoder
sound_codec             sounds to token ids and back
audio_language_model    sound that continues sound, as token ids of a sound codec (AudioLM)
text_to_image, drawing  pictures from texts, as token ids of a picture codec
"""

from headwater.tasks.audio_classification import AudioClassification
from headwater.tasks.audio_language_model import AudioLanguageModelTask
from headwater.tasks.base import OBJECTIVES, TASKS, Task, TaskData, get_task, register
from headwater.tasks.chat import Chat
from headwater.tasks.classification import Classification
from headwater.tasks.denoising import Denoising, SpanCorruption
from headwater.tasks.grpo import GRPO
from headwater.tasks.image_classification import ImageClassification
from headwater.tasks.image_text import ImageText
from headwater.tasks.language_model import CausalLM, PackedCausalLM
from headwater.tasks.masked_lm import MaskedLM, MaskedLMNextSentence
from headwater.tasks.picture_codec import PictureCodecTask
from headwater.tasks.ppo import PPO
from headwater.tasks.preference import Preference
from headwater.tasks.question_answering import QuestionAnswering
from headwater.tasks.reward_model import RewardModel
from headwater.tasks.segments import SegmentedLM
from headwater.tasks.seq2seq import Seq2Seq
from headwater.tasks.sound_codec import SoundCodecTask
from headwater.tasks.speech_recognition import SpeechRecognition
from headwater.tasks.text_to_image import TextToImage
from headwater.tasks.token_classification import TokenClassification

__all__ = ["OBJECTIVES", "TASKS", "Task", "TaskData", "get_task", "register"]

register(Seq2Seq(), Classification(), TokenClassification(), QuestionAnswering())
register(CausalLM(), PackedCausalLM(), SegmentedLM(), MaskedLM(), MaskedLMNextSentence(), Denoising(), SpanCorruption())
register(ImageClassification(), PictureCodecTask(), TextToImage(), ImageText())
register(SpeechRecognition(), AudioClassification())
register(SoundCodecTask(), AudioLanguageModelTask())
register(Chat(), Preference(), RewardModel(), PPO(), GRPO())
