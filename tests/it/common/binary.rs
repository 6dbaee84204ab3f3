//! The real binary as a user runs it, and the models that it is run on.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A trained model of 7 blocks, full indexers, Q4_K_M.
pub const GLM5_NANO: &str = "glm5-nano-Q4_K_M.gguf";
/// A model with full and shared indexers, Q2_K.
pub const NANO52: &str = "nano52-Q2_K.gguf";
/// The first shard of the smallest model, a split set.
pub const PICO: &str = "pico-Q4_K_M-split-00001-of-00004.gguf";

/// A file of goldens/models.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/models").join(name)
}

/// The split golden model's shard `number` of 4.
pub fn pico_shard(number: usize) -> PathBuf {
    golden(&format!("pico-Q4_K_M-split-{number:05}-of-00004.gguf"))
}

/// The binary, ready for arguments.
pub fn lockstep() -> Command {
    Command::new(env!("CARGO_BIN_EXE_lockstep"))
}

/// `lockstep inspect -m MODEL ARGS`, run to its end.
pub fn inspect(model: &Path, args: &[&str]) -> Run {
    run(lockstep().arg("inspect").arg("-m").arg(model).args(args))
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Run {
    Run::from(command.output().expect("the binary starts"))
}

/// What a finished process left.
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8 output");
        Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Run {
    /// Asserts the exit code and shows everything if it differs.
    pub fn exits(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    /// Asserts that stdout has `text`, wherever its lines are broken between words.
    pub fn says(&self, text: &str) -> &Self {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let found = words(&self.stdout).contains(&words(text));
        assert!(found, "no {text:?} in stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }

    /// Asserts that stdout does not have `text`.
    pub fn silent_on(&self, text: &str) -> &Self {
        assert!(!self.stdout.contains(text), "{text:?} in stdout:\n{}", self.stdout);
        self
    }
}
