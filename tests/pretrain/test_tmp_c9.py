from tests.pretrain.test_tasks import *
def test_x(checkpoint, tmp_path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.api.instance import Instance
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from pretrain.harness import Harness
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    export_hf(checkpoint, tmp_path / "hf", dtype=None, max_shard_bytes=10**9)
    subject = open_subject(checkpoint)
    theirs = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32), tokenizer=AutoTokenizer.from_pretrained(tmp_path / "hf"), prefix_token_id=subject.codec.eos_id, max_length=32, batch_size=4)
    for i in range(10):
        text = f"{' '.join(WORDS[i:i+5])}, {SENTENCE}, {SENTENCE}"
        req=[Instance("loglikelihood_rolling", {}, (text,), 0)]
        a,b=theirs.tok_encode(text), subject.codec.encode(text)
        print(i, len(a), a==b, theirs.loglikelihood_rolling(req, disable_tqdm=True), Harness(subject).loglikelihood_rolling(req))
        if a!=b: print(a[:40], b[:40])
        ours=Harness(subject)
        w=list(map(make_disjoint_window, get_rolling_token_windows(token_list=b,prefix_token=2,max_seq_len=32,context_len=1)))
        print([(len(x),len(y)) for x,y in w], [x[0] for x in theirs._loglikelihood_tokens([(("",""),x,y) for x,y in w], disable_tqdm=True)], [o.log_p for o in likelihoods(subject,w)])
