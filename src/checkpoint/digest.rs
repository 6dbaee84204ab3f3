//! A model's fingerprint, so that a dump can be told from one of another model without reading 400 GB.

use sha2::{Digest, Sha256};

use super::Checkpoint;

/// Bytes of each tensor that count, at its beginning and again at its end.
const SAMPLE: usize = 4096;

impl Checkpoint {
    /// `sha256-sampled:` and 64 hex digits: SHA-256 over every tensor's name, type, shape, first and last 4096 bytes, in
    /// order of name. Equal for equal files; a changed byte deep inside a tensor does not show.
    pub fn digest(&self) -> String {
        let source = self.source();
        let mut names = source.names();
        names.sort_unstable();
        let mut hash = Sha256::new();
        for name in names {
            let Some(view) = source.tensor(name) else { continue };
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name.as_bytes());
            hash.update(view.ty.id.to_le_bytes());
            hash.update((view.ne.len() as u64).to_le_bytes());
            for extent in &view.ne {
                hash.update(extent.to_le_bytes());
            }
            let bytes = view.bytes.as_ref();
            hash.update(&bytes[..bytes.len().min(SAMPLE)]);
            hash.update(&bytes[bytes.len().saturating_sub(SAMPLE)..]);
        }
        let digits: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        format!("sha256-sampled:{digits}")
    }
}
