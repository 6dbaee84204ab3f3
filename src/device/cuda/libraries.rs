//! NVIDIA's libraries, where they cannot be used: they are not there, cannot be loaded, or load and yet lack a function,
//! being too old, damaged, or another's of the same name.

use std::error::Error;
use std::panic;

/// Exit code of what cannot be run, as the command line's contract has it.
const CANNOT_RUN: i32 = 2;

/// Why `library` is of no use: the loader's own words, unless it is simply not there.
pub fn why(library: &str) -> String {
    // SAFETY: a library that the bindings have tried to load before.
    let loaded = unsafe { libloading::Library::new(library) };
    match loaded.map_err(|e| e.source().map_or(e.to_string(), ToString::to_string)) {
        Ok(_) => format!("{library} was loaded and does not answer"),
        Err(text) if text.contains("No such file") => format!("{library} was not found"),
        Err(text) => format!("{library} cannot be loaded ({text})"),
    }
}

/// The bindings panic at the first call of a function that a loaded library lacks, on whichever thread that is. From now
/// on such a call ends the process with a message that names both.
pub fn end_where_functions_are_missing() {
    let otherwise = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let text = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        let bindings = info.location().map_or("", |at| at.file());
        match message(text, bindings) {
            Some(message) => {
                eprintln!("lockstep: {message}");
                std::process::exit(CANNOT_RUN);
            }
            None => otherwise(info),
        }
    }));
}

/// The message for a panic of the bindings' file.
fn message(text: &str, bindings: &str) -> Option<String> {
    let function = text.strip_prefix("Missing symbol ")?.split(':').next()?;
    let (library, remedy) = match bindings {
        file if !file.contains("cudarc") => return None,
        file if file.contains("nvrtc") => ("libnvrtc.so", "install a current NVRTC (its wheel will do)"),
        file if file.contains("nccl") => ("libnccl.so", "install a current NCCL"),
        _ => ("libcuda.so", "update the NVIDIA driver, or run with --device cpu"),
    };
    Some(format!("the {library} that was loaded lacks the function {function}: {remedy}"))
}

#[cfg(test)]
mod tests {
    use super::message;

    #[test]
    fn libraries_are_told_by_their_bindings_and_other_panics_are_left_alone() {
        let said = |text: &str, file: &str| message(text, file).unwrap_or_default();
        let missing = "Missing symbol cuInit: dlsym failed";
        assert!(
            said(missing, "cudarc-0.19.10/src/driver/sys/mod.rs")
                .contains("libcuda.so that was loaded lacks the function cuInit:")
        );
        assert!(said(missing, "cudarc-0.19.10/src/nvrtc/sys/mod.rs").contains("libnvrtc.so"));
        assert!(said(missing, "cudarc-0.19.10/src/nccl/sys/mod.rs").contains("libnccl.so"));
        assert_eq!(said(missing, "src/main.rs"), "");
        assert_eq!(said("index out of bounds", "cudarc-0.19.10/src/driver/sys/mod.rs"), "");
    }
}
