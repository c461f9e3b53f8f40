"""Training of spectral models by the Trainer of transformers."""

import torch
import transformers
import zoo


class Prompts(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = zoo.prompt(1, seed=index)[0]
        return {"input_ids": tokens, "labels": tokens}


def trainer_of(model, folder, callbacks=None, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, learning_rate=1e-2,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=Prompts(), eval_dataset=Prompts(), callbacks=callbacks
    )
