//! A conversation as text, in the model's own template.

use crate::model::text_from;
use crate::{HostError, Model};
use llama_cpp_sys_2 as sys;
use std::ffi::CString;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Model {
    /// Writes a conversation as the text that the model was trained on.
    ///
    /// llama.cpp recognises the common templates by their content; it does not
    /// run the Jinja source. `add_assistant` ends the text with the head of the
    /// assistant's turn.
    ///
    /// # Errors
    /// [`HostError::Template`] when the model has no template, or one that
    /// llama.cpp does not know.
    pub fn apply_chat(
        &self,
        messages: &[ChatMessage],
        add_assistant: bool,
    ) -> Result<String, HostError> {
        let error = |reason: &str| HostError::Template { reason: reason.to_owned() };
        let c_string = |text: &str| CString::new(text).map_err(|_| error("a NUL byte in the text"));
        let template = self
            .chat_template()
            .ok_or_else(|| error("the model file has none; complete plain text with --raw"))?;
        let template = c_string(&template)?;
        let texts = messages
            .iter()
            .map(|m| Ok((c_string(&m.role)?, c_string(&m.content)?)))
            .collect::<Result<Vec<_>, HostError>>()?;
        let chat: Vec<_> = texts
            .iter()
            .map(|(role, content)| sys::llama_chat_message {
                role: role.as_ptr(),
                content: content.as_ptr(),
            })
            .collect();
        let text = text_from(|buf, len| {
            // SAFETY: all strings are NUL-terminated and outlive the call; the
            // buffer has the length that is given.
            unsafe {
                sys::llama_chat_apply_template(
                    template.as_ptr(),
                    chat.as_ptr(),
                    chat.len(),
                    add_assistant,
                    buf,
                    len,
                )
            }
        })
        .ok_or_else(|| {
            error(
                "llama.cpp does not know this model's template; complete plain text with --raw \
                 and write the turns yourself",
            )
        })?;
        String::from_utf8(text).map_err(|_| error("it makes text that is not UTF-8"))
    }
}
