//! Keys of a Hugging Face folder that decide nothing here and that other engines obey. Where the tensors, or the model's
//! type, say otherwise, one of the two is wrong: whoever obeys such a key loads nothing, or something else.

use super::{Checkpoint, Naming};
use crate::gguf::Value;
use crate::model::{ATTENTION_BIAS, CLASS};

/// Classes of other models begin so that have, or may have, tensors of these names.
const KIN: [&str; 2] = ["Glm", "Deepseek"];

/// A key that something contradicts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlagDoubt {
    /// The key.
    pub key: &'static str,
    /// What it says, and what says otherwise.
    pub detail: String,
    /// Whether no sound folder is so.
    pub certain: bool,
}

impl Checkpoint {
    /// Every such key.
    pub fn flag_doubts(&self) -> Vec<FlagDoubt> {
        if self.source().naming() != Naming::Hf {
            return Vec::new();
        }
        [self.biases(), self.quantised(), self.class()].into_iter().flatten().collect()
    }

    /// `attention_bias`, beside the biases that are there.
    fn biases(&self) -> Option<FlagDoubt> {
        let source = self.source();
        let stated = source.metadata().get(ATTENTION_BIAS).and_then(Value::as_bool);
        let names = source.names().into_iter().filter(|name| Naming::Hf.biased(name).is_some());
        let names: Vec<&str> = names.collect();
        let detail = match (stated, names.first()) {
            (Some(true), None) => format!("{ATTENTION_BIAS} is true, and the files hold no bias of attention"),
            (Some(false), Some(first)) => {
                format!("{ATTENTION_BIAS} is false, and the files hold {} of attention ({first})", biases(names.len()))
            }
            _ => return None,
        };
        Some(FlagDoubt { key: ATTENTION_BIAS, detail, certain: true })
    }

    /// `quantization_config`, beside weights of plain types. It may be meant for the cache of keys alone.
    fn quantised(&self) -> Option<FlagDoubt> {
        let (key, source) = ("quantization_config", self.source());
        let method = source.metadata().get("quantization_config.quant_method")?;
        let mut views = source.names().into_iter().filter_map(|name| source.tensor(name));
        let is_plain = views.all(|view| view.ty.quant.is_some_and(|ty| ty.is_plain()));
        let detail = format!(
            "{key}.quant_method is {method}, and every tensor is of a plain type: here they are read as they are, other \
             engines look for packed ones"
        );
        is_plain.then_some(FlagDoubt { key, detail, certain: false })
    }

    /// `architectures`, beside the model's type and the tensors, which are this one's.
    fn class(&self) -> Option<FlagDoubt> {
        let (key, metadata) = ("architectures", self.source().metadata());
        let list = metadata.get(key)?.as_array()?;
        let names: Vec<String> = (0..list.len()).filter_map(|i| Some(list.get(i)?.as_str()?.to_string())).collect();
        let other = names.iter().find(|name| !name.starts_with(CLASS))?;
        let own_code = metadata.get("auto_map.AutoModelForCausalLM").is_some();
        let detail = format!(
            "{key} names {other}, model_type and tensors are those of {CLASS}: engines that go by the class build another \
             model"
        );
        let certain = self.coverage().is_whole() && !own_code && !KIN.iter().any(|kin| other.starts_with(kin));
        Some(FlagDoubt { key, detail, certain })
    }
}

fn biases(n: usize) -> String {
    if n == 1 { "1 bias".into() } else { format!("{n} biases") }
}
