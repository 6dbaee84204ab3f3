//! What the documents say can be done: README keeps its size, every path that is named exists, and every `lockstep`
//! command in a block runs and ends as its comment says. What takes minutes or a GPU is parsed only.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use lockstep::cli::args::{Cli, Command as Parsed, DeviceArg};

/// Commands that take a model, which is put in where none is named: tests are built without the built-in one, too.
const WITH_MODEL: [&str; 6] = ["inspect", "verify", "bisect", "generate", "dump", "bench"];

/// Commands and flags of builds that have the CUDA device.
const OF_CUDA: [&str; 3] = ["kernels", "--kernels-dir", "--batch"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The documents: those of the root and of docs/.
fn documents() -> Vec<(PathBuf, String)> {
    let mut paths = Vec::new();
    for folder in [root(), root().join("docs")] {
        let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
        paths.extend(entries.filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    paths.sort();
    assert!(paths.len() >= 7, "{paths:?}");
    paths.into_iter().map(|p| (p.clone(), std::fs::read_to_string(p).unwrap())).collect()
}

/// The lines of a document: those of its blocks (fenced with the block's language, or indented by four), and the rest.
fn split(text: &str) -> (Vec<(&str, &str)>, Vec<&str>) {
    let (mut blocks, mut prose, mut fence) = (Vec::new(), Vec::new(), None);
    for line in text.lines() {
        match (line.trim_start().strip_prefix("```"), fence) {
            (Some(_), Some(_)) => fence = None,
            (Some(language), None) => fence = Some(language),
            (None, Some(language)) => blocks.push((language, line.trim())),
            (None, None) if line.starts_with("    ") => blocks.push(("", line.trim())),
            (None, None) => prose.push(line),
        }
    }
    (blocks, prose)
}

#[test]
fn the_readme_keeps_its_size() {
    let text = std::fs::read_to_string(root().join("README.md")).unwrap();
    assert!(text.lines().count() <= 120, "{} lines", text.lines().count());
    for (i, line) in text.lines().enumerate() {
        assert!(line.chars().count() <= 110, "line {}: {} characters", i + 1, line.chars().count());
    }
}

/// What stands in backticks or in a link of a line.
fn named(line: &str) -> Vec<&str> {
    let mut all: Vec<&str> = line.split('`').skip(1).step_by(2).collect();
    all.extend(line.split("](").skip(1).filter_map(|rest| rest.split(')').next()));
    all
}

/// True for what can only be a path of the project: its first part is there, or it ends as source files do.
fn is_path(text: &str) -> bool {
    let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
    let (first, last) = (text.split('/').next().unwrap(), text.rsplit('.').next().unwrap());
    let ending = ["rs", "md", "cu", "cuh", "py", "sh"].contains(&last);
    // What begins with a slash is a route, or a place of somebody's machine.
    plain
        && !text.starts_with('/')
        && if text.contains('/') { ending || root().join(first).exists() } else { last == "md" }
}

#[test]
fn every_path_that_is_named_exists() {
    let mut seen = 0;
    for (document, text) in documents() {
        for name in split(&text).1.into_iter().flat_map(named).filter(|name| is_path(name)) {
            let from = |folder: &Path| folder.join(name).exists();
            assert!(from(&root()) || from(document.parent().unwrap()), "{}: {name}", document.display());
            seen += 1;
        }
    }
    assert!(seen > 100, "{seen} paths");
}

/// A line as a shell takes it apart, without its comment.
fn words(line: &str) -> Vec<String> {
    let (mut all, mut quote) = (vec![String::new()], None);
    for c in line.chars() {
        match (c, quote) {
            ('"' | '\'', None) => quote = Some(c),
            (c, Some(open)) if c == open => quote = None,
            (' ', None) => all.push(String::new()),
            ('#', None) if all.last().unwrap().is_empty() => break,
            (c, _) => all.last_mut().unwrap().push(c),
        }
    }
    assert!(quote.is_none(), "{line}: a quote is open");
    all.retain(|word| !word.is_empty());
    all
}

/// A command of a document, with real arguments, and how it ends.
struct Documented {
    line: String,
    args: Vec<String>,
    exit: i32,
}

impl Documented {
    fn read(line: &str, folder: &Path) -> Option<Self> {
        let line = line.trim_start_matches("$ ");
        let mut args = line.starts_with("lockstep ").then(|| words(line))?;
        let exit =
            line.rsplit_once("# exit ").map_or(0, |(_, code)| code.split_whitespace().next().unwrap().parse().unwrap());
        let command = args.get(1).cloned().unwrap_or_default();
        if WITH_MODEL.contains(&command.as_str()) && !args.iter().any(|a| a == "-m") {
            args.extend(["-m".into(), "MODEL".into()]);
        }
        // The trained model ends a text by itself; the other is smaller.
        let model = match command.as_str() {
            "generate" => "goldens/models/glm5-nano-Q4_K_M.gguf",
            _ => "goldens/models/pico-Q4_K_M-split-00001-of-00004.gguf",
        };
        for arg in &mut args {
            match arg.as_str() {
                "MODEL" => *arg = model.into(),
                "DIR" => *arg = folder.join("dir").display().to_string(),
                "PATH" => *arg = folder.join("file.gguf").display().to_string(),
                "FILE" => *arg = "goldens/glm5-nano/recall.json".into(),
                _ => {}
            }
        }
        Some(Documented { line: line.into(), args, exit })
    }

    /// True if this build has what it is about.
    fn is_of_this_build(&self) -> bool {
        cfg!(feature = "cuda") || !self.args.iter().any(|a| OF_CUDA.contains(&a.as_str()))
    }

    /// Runs it, unless that takes minutes or a GPU. True if it ran.
    fn check(&self) -> bool {
        let Documented { line, args, exit } = self;
        let parsed = Cli::try_parse_from(args).unwrap_or_else(|e| panic!("{line}\n{e}"));
        let short = match parsed.command {
            Parsed::Inspect(_) => true,
            Parsed::Verify(a) => {
                // No server runs here.
                let server = a.subject.target.as_ref().is_some_and(|t| t.to_string_lossy().contains("://"));
                let target = a.subject.target.is_some();
                on_cpu(&a.subject.device.device) && !server && (!a.stages.is_empty() || target)
            }
            Parsed::Bisect(a) => {
                on_cpu(&a.subject.device.device) && (!a.subject.inject.is_empty() || a.subject.target.is_some())
            }
            Parsed::Generate(a) => on_cpu(&a.device.device),
            Parsed::Dump(a) => on_cpu(&a.subject.device.device),
            Parsed::Synth(a) => a.small,
            Parsed::Bench(_) | Parsed::Doctor(_) => false,
            #[cfg(feature = "serve")]
            Parsed::Serve(a) => a.print_unit,
            #[cfg(feature = "cuda")]
            Parsed::Kernels(a) => matches!(a.action, lockstep::cli::args::KernelsAction::List { .. }),
        };
        if !short {
            return false;
        }
        // What is to be made must not be there; an earlier command of the block may have made it.
        if let Some(at) = args.iter().position(|a| a == "--out") {
            let _ = std::fs::remove_dir_all(&args[at + 1]); // there may be none
            let _ = std::fs::remove_file(&args[at + 1]);
        }
        let run = Command::new(env!("CARGO_BIN_EXE_lockstep")).args(&args[1..]).current_dir(root()).output().unwrap();
        let said = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(*exit), "{line}\n{}\n{said}", String::from_utf8_lossy(&run.stdout));
        true
    }
}

fn on_cpu(device: &DeviceArg) -> bool {
    *device == DeviceArg::Cpu
}

#[test]
fn every_command_runs_and_ends_as_it_is_documented() {
    let (mut ran, mut parsed) = (0, 0);
    for (document, text) in documents() {
        let folder = tempfile::tempdir().unwrap();
        for (language, line) in split(&text).0 {
            let Some(documented) = Documented::read(line, folder.path()) else { continue };
            assert!(language.is_empty(), "{}: {line} stands in a block of {language}", document.display());
            if documented.is_of_this_build() {
                *(if documented.check() { &mut ran } else { &mut parsed }) += 1;
            }
        }
    }
    assert!(ran >= 12 && parsed >= 5, "{ran} ran, {parsed} were parsed");
}

#[test]
fn lines_are_taken_apart_as_a_shell_does() {
    assert_eq!(words("lockstep generate \"Genesis 1:1\"  # text # more"), ["lockstep", "generate", "Genesis 1:1"]);
    assert_eq!(words(r"a --filter 'attn\.q_a$'"), ["a", "--filter", r"attn\.q_a$"]);
    let read = |line: &str| Documented::read(line, Path::new("/x"));
    let found = read("$ lockstep dump --out DIR # exit 3").unwrap();
    assert_eq!((found.exit, found.args[3].as_str(), found.args[4].as_str()), (3, "/x/dir", "-m"));
    assert!(read("cargo test").is_none() && read("").is_none());
    assert!(is_path("src/nowhere.rs") && is_path("nowhere/at/all.rs") && is_path("docs/none.md") && is_path("NONE.md"));
    assert!(!is_path("name/version") && !is_path("cpu") && !is_path("dump.json"));
}
